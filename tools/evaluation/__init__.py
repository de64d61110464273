"""Zero-shot evaluation through the lm-evaluation-harness: suites, data, scoring, tables."""
