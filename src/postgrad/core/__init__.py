"""Words that every room shares: records, settings, names, seeds, batch numbers, errors."""
