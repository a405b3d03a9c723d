"""Tools for tests, of this package and of others."""
