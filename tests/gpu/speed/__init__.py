"""Promises on the times of the whole engine: starts, full steps; and times of steps with drafts."""
