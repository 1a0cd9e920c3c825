"""One update of SFT on GSM8K's conversations."""
