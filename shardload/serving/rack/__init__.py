"""How the servers of a rack fetch each block of a remote checkpoint once. See design note 0043."""
