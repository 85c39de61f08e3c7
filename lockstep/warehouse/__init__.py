"""The warehouse: tables from the vendor's metadata, additive change, and the statements of each dialect."""
