-- What somebody may still ask for, shared by all replicas of a service. Unlogged: it is written with every request, and
-- after a crash everybody simply starts with a full budget.
CREATE UNLOGGED TABLE request_budget (
    owner   text             PRIMARY KEY,
    tokens  double precision NOT NULL,
    granted boolean          NOT NULL,
    at      timestamptz      NOT NULL
);
