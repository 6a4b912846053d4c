"""What chat templates take, and conversations in the forms that they take."""
