"""The server: the picture tasks over HTTP, many requests in one running decode."""
