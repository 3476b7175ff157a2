"""Checks of the pages, shared by the tests of each page and by those of mutants.

They read the DOM or pixels. Their references share no code with the server's routes.
"""
