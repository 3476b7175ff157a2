"""Images in prompts: encoded between steps, kept, and put in the places of their tokens."""
