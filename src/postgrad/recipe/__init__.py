"""What a recipe may say: the settings of the rooms below, put together for each job."""
