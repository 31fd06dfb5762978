"""The exams: conformance kits for groups, strategies and engines, for third parties too."""
