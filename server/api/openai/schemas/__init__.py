"""Request bodies. Each field is applied, accepted without effect, refused, or listed as ignored."""
