"""Helpers that tests share: small models, golden files, the oracle, browsers and servers."""
