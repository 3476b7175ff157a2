"""The documentation as a site with a search: `make docs`."""
