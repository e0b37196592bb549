"""A second model that proposes drafts: its pages, its steps and its pace."""
