-- Budgets of all services are in kernel.request_budget now.
DROP TABLE request_budget;
