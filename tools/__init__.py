"""Programs for developers and operators."""
