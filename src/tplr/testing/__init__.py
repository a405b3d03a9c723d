"""Tools for the tests of this package and of other packages."""
