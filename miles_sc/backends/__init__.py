"""How a policy is built, run forward and backward, stepped, saved and exported."""
