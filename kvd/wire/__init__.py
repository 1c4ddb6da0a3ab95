"""What is spoken between a client and the daemon: control frames and messages, payloads of the rings."""
