"""What families declare their models with: records, and entries that several families share."""
