"""A simulated prover that writes its log live, for demonstrations and tests."""
