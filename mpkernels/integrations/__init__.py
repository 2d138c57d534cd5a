"""Adapts mpkernels to other libraries that need more than an import. Each file is for one library, and imports it."""
