"""Building, cutting and checking a release (docs/releasing.md)."""
