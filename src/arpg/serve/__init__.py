"""The server: image tasks over HTTP, with continuous batching."""
