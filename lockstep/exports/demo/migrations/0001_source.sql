-- A source to export from: a list of keys, and a function that computes their rows instead of storing them, so that
-- every machine has the same bytes without loading a gigabyte. Nothing here depends on the clock, a collation or a
-- random number: the same key and date always give the same rows.
CREATE TABLE source_key (
    key          text    PRIMARY KEY,
    rows_per_day integer NOT NULL CHECK (rows_per_day >= 0)
);

INSERT INTO source_key (key, rows_per_day)
SELECT 'ABC', 3200 UNION ALL SELECT 'XYZ', 2700
UNION ALL
SELECT 'K' || lpad(n::text, 4, '0'), 2000 + (n * 7919) % 3000 FROM generate_series(1, 500) AS n;

-- Unknown keys have no rows. The date moves the figures and, a little, the number of rows.
CREATE FUNCTION public.export_rows(key text, effective_date date)
RETURNS TABLE (
    line_no    integer,
    account    text,
    product    text,
    quantity   integer,
    price      numeric(12, 4),
    traded_at  timestamp,
    note       text
)
LANGUAGE sql STABLE PARALLEL SAFE ROWS 4000
AS $$
    SELECT n,
           'AC' || lpad(((n::bigint * 7919 + ($2 - date '2000-01-01')) % 100000)::text, 6, '0'),
           $1 || '-' || ((n::bigint * 31 + ($2 - date '2000-01-01')) % 97),
           ((n::bigint * 104729 + ($2 - date '2000-01-01') * 17) % 1000)::integer - 100,
           (((n::bigint * 15485863 + ($2 - date '2000-01-01')) % 10000000)::numeric / 10000)::numeric(12, 4),
           $2::timestamp + make_interval(secs => (n % 86400)::double precision),
           CASE n % 5 WHEN 0 THEN NULL WHEN 1 THEN '' WHEN 2 THEN 'plain' WHEN 3 THEN 'with, comma' ELSE 'says "yes"' END
      FROM demo.source_key AS k
     CROSS JOIN LATERAL generate_series(1, k.rows_per_day + ($2 - date '2000-01-01') % 7) AS n
     WHERE k.key = $1
$$;

COMMENT ON FUNCTION public.export_rows(text, date) IS 'All rows of one key on one day, unpaged: the contract of exports.';
