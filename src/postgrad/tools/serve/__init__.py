"""`postgrad serve-reward`: a reward model behind HTTP."""
