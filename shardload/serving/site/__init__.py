"""The pages of a server, for people. See design note 0045."""
