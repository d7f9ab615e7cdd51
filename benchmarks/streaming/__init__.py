"""A source of server-sent events whose every send is stamped, a sink whose every read is, and proxies between them."""
