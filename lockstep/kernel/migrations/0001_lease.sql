-- One row per lane. The row outlives its holder: the fence must never go back, so a lane is released, not deleted.
CREATE TABLE lease (
    lane        text        PRIMARY KEY CHECK (lane <> ''),
    owner       text,
    fence       bigint      NOT NULL CHECK (fence > 0),
    lease_until timestamptz NOT NULL,
    acquired_at timestamptz NOT NULL,
    renewed_at  timestamptz NOT NULL
);
