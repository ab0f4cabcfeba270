"""Methods against each other on equal budgets of generated tokens: plan, cells, statistics, figures, report."""
