"""Packing: from a histogram of sizes to rows. It knows no examples, epochs or steps."""
