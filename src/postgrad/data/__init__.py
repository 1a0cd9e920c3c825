"""Datasets: readers, chat templates, loss masks, and which row a ticket draws."""
