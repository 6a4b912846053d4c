"""specray and its peers over the same prompts, in turns."""
