"""Matrix products: column and leaf products, and their admission at start-up."""
