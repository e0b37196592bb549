"""A body of JSON becomes requests: schema, limits, problems, prompts and what resumes."""
