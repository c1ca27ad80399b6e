"""What teachers use; a student's edition of the course has none of it."""
