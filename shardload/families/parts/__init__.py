"""Building blocks for declaring families: records, and configuration entries that several families share."""
