"""Other model servers, for `make bench-peers`: their environments and how each is measured."""
