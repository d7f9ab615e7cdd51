"""The sidecar: forwards unchanged, stamps at the socket, records, exposes."""
