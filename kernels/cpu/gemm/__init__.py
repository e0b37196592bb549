"""Matrix products on the CPU, and the start-up check of their bit class."""
