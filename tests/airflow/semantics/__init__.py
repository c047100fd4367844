"""What each click and each loss does to each way of waiting: one table, whose cells are tests and a page."""
