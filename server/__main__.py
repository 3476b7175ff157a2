"""`python -m server`: the command `penstock` without an installation."""

from server.cli import app

app(prog_name="penstock")
