"""The release, for people and for the handshake; pyproject.toml says the same."""

VERSION = "0.1.0"
