"""Request bodies. A field is applied, accepted as harmless, refused, or listed as ignored."""
