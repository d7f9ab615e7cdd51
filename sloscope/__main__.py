from sloscope.cli import main

main()
