"""What the processes of one run tell each other, and how they fail together."""
