-- What a client may still ask for, shared by all replicas of the service. Unlogged: it is read with every request and
-- written with every request, and after a crash everybody simply starts with a full budget.
CREATE UNLOGGED TABLE request_budget (
    client_id text             PRIMARY KEY,
    tokens    double precision NOT NULL,
    granted   boolean          NOT NULL,
    at        timestamptz      NOT NULL
);

CREATE INDEX job_chunk_failed ON job_chunk (completed_at) WHERE status = 'FAILED';
