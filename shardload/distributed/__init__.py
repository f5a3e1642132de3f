"""Communication between the processes of one run, and their common handling of failures."""
