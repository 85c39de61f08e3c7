"""Windows: Veeva Direct Data into the warehouse, in order and exactly once."""
