"""``specray bench``: one module for each command."""
