"""What other libraries need beyond an import: a file for each, which imports it."""
