"""`postgrad chat`: a conversation with one model, or with two side by side."""
