"""What a job ad asks for, checked."""
